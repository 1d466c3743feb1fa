"""Moving buckets and dense parameters between servers: the plan, the two servers of a transfer, and taking back."""
