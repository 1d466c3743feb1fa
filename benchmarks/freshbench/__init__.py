"""FreshBench: what it is worth to train on what has just happened, and to serve it soon. docs/freshbench.md explains it."""
