"""What Gluon kernels of all families share."""
