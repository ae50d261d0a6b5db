"""Distributions that the tests install."""
