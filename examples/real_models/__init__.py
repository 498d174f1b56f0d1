"""Small pretrained models from the package registry, for trying out and for tests."""
