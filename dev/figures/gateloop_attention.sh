#!/usr/bin/env bash
# gateloop_attention.sh: surrogate attention of trained models: the same outputs as sums over
# earlier tokens, whose weights A are real after Re(): the mean |A| over channels, and the signed
# A of one channel, for the first and the last layer. The runs are those of
# gateloop_transitions.sh, which are not made twice; dev/gateloop_maps.py holds every map against
# the trainer's y.
MAPS=attention exec bash "$(dirname "$0")/gateloop_transitions.sh"
