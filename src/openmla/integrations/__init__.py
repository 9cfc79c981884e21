"""openmla inside other projects. Each integration is imported only where it is asked for."""
