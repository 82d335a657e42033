"""Losses of single tokens, one file a family; packing gives the weights with which they are added up.

Everything here sees trainable tokens only (`_N`): what is masked was left out before, so nothing that stands there, not
even a NaN, can reach a loss or a gradient.
"""
