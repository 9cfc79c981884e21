"""The version, alone, so that packaging can read it without importing torch."""

VERSION = "0.1.0"
