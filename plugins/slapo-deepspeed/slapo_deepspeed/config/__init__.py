"""DeepSpeed's configuration: read, checked, filled in, and shown."""
