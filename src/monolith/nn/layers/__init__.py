"""The layers of recommendation models as ordinary `nn.Module`s.

Shapes: B examples, n features, k embedding size, T steps of a sequence. Layers over features take and give [B, n, k]: stack
embeddings with `torch.stack(list, dim=1)`, flatten with `x.flatten(1)`, take apart with `x.unbind(1)`. Initial values are drawn
from torch's generator: the same `torch.manual_seed`, the same layer. Every layer can be exported by `torch.export` with a dynamic
batch dimension.
"""
