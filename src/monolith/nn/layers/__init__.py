"""The layers of recommendation models as ordinary `nn.Module`s.

Shapes: B examples, n features, k embedding size, T steps of a sequence. Layers over features take and give [B, n, k]: stack
embeddings with `torch.stack(list, dim=1)`, flatten with `x.flatten(1)`, take apart with `x.unbind(1)`. Initial values are drawn
from torch's generator: the same `torch.manual_seed`, the same layer. Every layer can be exported by `torch.export` with a dynamic
batch dimension.
"""

from monolith.nn.layers.activations import Activation, Sigmoid2, make_activation
from monolith.nn.layers.attention import DIN, DMRU2I
from monolith.nn.layers.auxiliary import HasAuxiliaryLoss, auxiliary_loss
from monolith.nn.layers.co_action import CAN
from monolith.nn.layers.cross import DCN
from monolith.nn.layers.dense import AddBias, Dense
from monolith.nn.layers.factorization import FFM, FM, DotInteraction
from monolith.nn.layers.gating import IRazor, SENet
from monolith.nn.layers.interaction import CIN, AllInt, AutoInt, CDot
from monolith.nn.layers.logit_correction import LogitCorrection, correct_logits
from monolith.nn.layers.masking import sequence_mask
from monolith.nn.layers.mixed_embedding import MixedEmbedding
from monolith.nn.layers.mlp import MLP, LHUCTower, MLPOptions
from monolith.nn.layers.mmoe import MMoE
from monolith.nn.layers.norms import BatchNorm
from monolith.nn.layers.pooling import AvgPooling, MaxPooling, SumPooling
from monolith.nn.layers.relaxation import continuous_topk, fid_counter, gumbel_keys, sample_subset
from monolith.nn.layers.sequence import AGRU, DIEN, AGRUCell
from monolith.nn.layers.snr import SNR

__all__ = [
    "AGRU",
    "AGRUCell",
    "Activation",
    "AddBias",
    "AllInt",
    "AutoInt",
    "AvgPooling",
    "BatchNorm",
    "CAN",
    "CDot",
    "CIN",
    "DCN",
    "DIEN",
    "DIN",
    "DMRU2I",
    "Dense",
    "DotInteraction",
    "FFM",
    "FM",
    "HasAuxiliaryLoss",
    "IRazor",
    "LHUCTower",
    "LogitCorrection",
    "MLP",
    "MLPOptions",
    "MMoE",
    "MaxPooling",
    "MixedEmbedding",
    "SENet",
    "SNR",
    "Sigmoid2",
    "SumPooling",
    "auxiliary_loss",
    "continuous_topk",
    "correct_logits",
    "fid_counter",
    "gumbel_keys",
    "make_activation",
    "sample_subset",
    "sequence_mask",
]
