"""Linear layers and what is built of them: MLPs and experts."""
