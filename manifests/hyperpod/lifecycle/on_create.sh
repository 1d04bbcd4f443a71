#!/bin/bash
# HyperPod runs this once on each new node, as root, before the node joins the cluster. Nothing is installed: the
# node image brings drivers, EFA and the kubelet, and everything else is a pod. It only leaves a line in CloudWatch.
set -euo pipefail
echo "crosstrain: node $(hostname) is up, $(nproc) CPUs"
