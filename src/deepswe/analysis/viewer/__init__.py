"""The viewer: every attempt of a run in one page that needs no network."""
