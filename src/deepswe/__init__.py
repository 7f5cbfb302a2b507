"""deepswe: reinforcement learning of software-engineering agents, whole on one CPU box and on a cluster by recipe.

Importing this package loads neither torch nor transformers.
"""

__version__ = "0.1.0"
