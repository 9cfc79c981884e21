"""What registers hold: element types, tensors and pointers, and the layouts they carry along."""
