"""What the GPU benchmarks share: random models, and the engines that run beside."""
