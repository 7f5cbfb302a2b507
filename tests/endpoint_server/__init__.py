"""A model that is none: an endpoint of both formats that plays the reference solver of micro tasks, with faults."""
