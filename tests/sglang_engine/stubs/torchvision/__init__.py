"""In the place of torchvision, whose build does not fit torch's for CPUs: text needs none of it."""

from absent import fill

__version__ = "0.28.0"
fill(
    "torchvision",
    """transforms transforms.functional transforms.v2 transforms.v2.functional io ops models utils
    datasets""",
)
