"""One trial, in processes of its own."""
