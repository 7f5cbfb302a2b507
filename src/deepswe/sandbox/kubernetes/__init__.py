"""The Kubernetes backend: one pod a sandbox, one session into each pod."""
