"""A Kubernetes API server for tests, for real kubectl and real clients; its pods are sandboxes of this machine."""
