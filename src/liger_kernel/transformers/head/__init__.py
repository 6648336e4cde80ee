"""The output head and its loss as one operation: what replaces the logits until somebody needs them."""
