"""Ranges of keys of a request in latent form: the rule on the device, and the merge."""
