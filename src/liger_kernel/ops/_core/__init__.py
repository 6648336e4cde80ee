"""The declaration of operators, their launches and configurations, and functions that kernels
share."""
