"""Calls of other libraries under their own names, served by openmla."""
