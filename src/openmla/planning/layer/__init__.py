"""Choices of a whole attention layer, made before any kernel is planned."""
