"""Check dialects by training small models."""
