"""Flows: the rows of one source by where they come from, several sources as one, and which element is the last."""

from monolith.original.flows.cache_one import CacheOneDataset
from monolith.original.flows.merge import MergedFlows, merge_flow
from monolith.original.flows.split import Flow, FlowSplit, split_flow

__all__ = ["CacheOneDataset", "Flow", "FlowSplit", "MergedFlows", "merge_flow", "split_flow"]
