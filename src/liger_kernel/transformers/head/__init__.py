"""The output head and its loss as one: what stands in for logits until somebody needs them."""
