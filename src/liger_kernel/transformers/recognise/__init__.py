"""What can be replaced in a model of Transformers, and how to know that the replacement is
right."""
