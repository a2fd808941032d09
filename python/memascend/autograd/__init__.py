"""Parameters and gradients as autograd and PyTorch's functions see them: proxies, dispatch, recomputation."""
