"""The mistakes, by what they are about."""
