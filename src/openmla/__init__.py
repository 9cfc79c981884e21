"""openmla: Multi-head Latent Attention prefill for Python."""

from openmla.errors import InvalidArgument, OpenMLAError, Unsupported
from openmla.version import VERSION as __version__

__all__ = ["InvalidArgument", "OpenMLAError", "Unsupported", "__version__"]
