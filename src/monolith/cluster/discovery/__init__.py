"""Service discovery: how the processes of a job find each other, one module for each back end."""
