"""Losses over a vocabulary that ranks share."""
