"""The `deepswe` command: each command parses, calls one library function and prints."""
