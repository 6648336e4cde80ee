"""The output head and its loss as one operation. Recipes replace the logits until some code
reads them."""
