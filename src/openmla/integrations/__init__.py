"""openmla inside other projects. Each integration is imported only by who asks for it."""
