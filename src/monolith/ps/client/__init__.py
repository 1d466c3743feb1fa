"""The worker's side: stores, dense parameters and logs that are on servers."""
