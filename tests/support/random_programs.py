"""Pieces of programs over an offloaded model: uses of parameters, gradients and buffers by users of PyTorch.

Every piece is Python over the names that `differential.Side` gives. `$names` are drawn anew for every use: see
`VALUES`. `kept` holds objects that a program keeps over time, `hooks` the handles of its hooks.
"""

from __future__ import annotations

import string
from textwrap import dedent

#: Values for a `$name` in a piece, the simplest first.
VALUES: dict[str, list[str]] = {
    "p": [
        "model.head.weight",
        "model.scale",
        "model.body.layers[0].up.weight",
        "model.body.layers[1].gain",
        "model.body.layers[2].up.bias",
        "model.body.layers[2].down.weight",
        "model.body.layers[1].norm.weight",
        "model.body.layers[0].unused",
        "model.body.embedding.weight",
        "model.body.norm.bias",
    ],
    "matrix": [
        "model.head.weight",
        "model.body.layers[0].up.weight",
        "model.body.layers[2].down.weight",
        "model.body.embedding.weight",
    ],
    "vector": ["model.body.layers[1].gain", "model.body.layers[2].up.bias", "model.body.norm.weight"],
    "module": [
        "model.head",
        "model.body",
        "model.body.layers[1]",
        "model.body.layers[0].up",
        "model",
        "model.body.norm",
    ],
    # A hook inside a block runs when the block is computed again, too.
    "outer": ["model.head", "model.body", "model.body.layers[1]", "model", "model.body.norm"],
    "block": ["model.body.layers[0]", "model.body.layers[1]", "model.body.layers[2]"],
    "k": ["0", "1", "2", "3"],
    "c": ["0.5", "0.9", "2.0", "-0.25"],
    "none": ["True", "False"],
    "owner": ["optimizer", "model"],
}

#: Groups of pieces, by name: each a way of using the model. The simplest piece is first.
GROUPS: dict[str, list[str]] = {}


def group(name: str, text: str) -> None:
    """Add a group: pieces are parted by empty lines."""
    pieces = [piece.strip("\n") for piece in dedent(text).strip("\n").split("\n\n")]
    GROUPS[name] = [piece for piece in pieces if piece]
    for piece in GROUPS[name]:
        assert set(string.Template(piece).get_identifiers()) <= VALUES.keys(), piece


group(
    "train",
    """
    loss = model(*batch($k)).loss
    loss.backward()
    show(loss)

    optimizer.step()
    optimizer.zero_grad()

    loss = model(*batch($k)).loss
    loss.backward()
    optimizer.step()
    $owner.zero_grad(set_to_none=$none)
    loss = model(*batch(3)).loss
    loss.backward()
    optimizer.step()
    $owner.zero_grad(set_to_none=$none)
    show(loss)

    optimizer.step()
    $owner.zero_grad(set_to_none=$none)

    $owner.zero_grad(set_to_none=$none)

    show(optimizer.clip_grad_norm_(0.1))

    optimizer.param_groups[0]["lr"] *= $c ** 2

    flush()
    """,
)

group(
    "forwards",
    """
    loss = model(*batch($k)).loss
    show(loss)

    loss.backward()

    loss.backward(retain_graph=True)

    loss = model(*batch(0)).loss + $c * model(*batch(1)).loss
    show(loss)
    loss.backward()

    losses = [model(*batch(k)).loss for k in range(2)]
    losses[0].backward()
    losses[1].backward()

    with torch.no_grad():
        show(model(*batch($k)).logits)

    with torch.inference_mode():
        show(model(*batch($k)).logits.clone())

    model.eval()
    with torch.no_grad():
        show(model(*batch($k)).logits)
    model.train()

    model.train(not model.training)

    model.train()

    loss = model(*batch($k)).loss
    with torch.no_grad():
        show(model(*batch(3)).loss)
    loss.backward()

    h = model.body(batch($k)[0])
    loss = F.linear(h, model.head.weight).square().mean()
    show(loss)
    loss.backward()

    h = model.body.embedding(batch($k)[0])
    loss = $block(h).square().mean()
    show(loss)
    loss.backward()

    h = model.body.embedding(batch($k)[0])
    for _ in range(2):
        h = $block(h)
    loss = h.square().mean()
    loss.backward()
    show(loss)

    show($block(torch.full((1, 3, 192), 0.5)).sum())

    with torch.no_grad():
        ids = batch($k)[0]
        for _ in range(3):
            logits = model(ids, ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        show(ids)

    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch($k)).loss
    show(loss)
    loss.backward()

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = $block($block(torch.full((1, 3, 192), 0.5))).square().mean()
    show(loss)
    loss.backward()

    out = torch.func.functional_call(model, dict(model.named_parameters()), batch($k))
    show(out.loss)
    out.loss.backward()
    """,
)

group(
    "autograd",
    """
    g = torch.autograd.grad(model(*batch($k)).loss, [$p], allow_unused=True)
    show(g)

    loss = model(*batch($k)).loss
    g = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    show(g)
    loss.backward()

    loss = model(*batch($k)).loss
    g = torch.autograd.grad(loss, [$matrix], create_graph=True)
    show(g)
    (loss + 0.1 * g[0].square().sum()).backward()

    h = model.body.embedding(batch($k)[0])
    h.retain_grad()
    loss = $block(h).square().mean()
    loss.backward()
    show(h.grad)

    h = model.body.embedding(batch($k)[0]).detach().requires_grad_()
    show(torch.autograd.grad($block(h).square().mean(), h))

    loss = model(*batch($k)).loss
    loss.backward(inputs=[$p])
    show(loss)

    h = model.body(batch($k)[0])
    model.head(h).backward(torch.full((2, 5, model.head.weight.shape[0]), $c))

    h = torch.sigmoid(model.body(batch($k)[0]))
    h.add_(1)
    try:
        h.sum().backward()
    finally:
        model.zero_grad()

    h = model.body.embedding(batch($k)[0])
    loss = $block(h).square().mean()
    h.add_(1)
    try:
        loss.backward()
    finally:
        model.zero_grad()
    """,
)

group(
    "penalties",
    """
    loss = model(*batch($k)).loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
    show(loss)
    loss.backward()

    loss = 0.1 * $p.norm() + $p.sum()
    show(loss)
    loss.backward()

    loss = model(*batch($k)).loss + 0.1 * $matrix.norm()
    loss.backward()
    show(loss)

    loss = model(*batch($k)).loss + 0.1 * ($vector * 2)[3:7].sum() + $matrix.t()[0].abs().sum()
    loss.backward()
    show(loss)
    """,
)

group(
    "gradients read",
    """
    show($p.grad)

    show([p.grad.norm() for p in model.parameters() if p.grad is not None])

    show(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    show($p.grad is None, $p.grad.shape, $p.grad.dtype)

    show($p.grad.detach().clone(), $p.grad.data.abs().max(), $p.grad.sum().item())

    show(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    show(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None]))

    show($p.grad.isfinite().all(), ($p.grad * $p).sum())

    kept["grad"] = $p.grad

    kept["clone of grad"] = $p.grad.clone()

    kept["view of grad"] = $p.grad.view(-1)[:3]

    show(kept["grad"])

    show(kept["clone of grad"])

    show(kept["view of grad"])
    """,
)

group(
    "gradients written",
    """
    $p.grad = None

    $p.grad.mul_($c)

    $p.grad = $p.grad * $c

    $p.grad[0] = $c

    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_($c)

    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * $c

    show(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)

    $p.grad.zero_()

    $p.grad.add_($p.detach(), alpha=0.1)

    $p.grad.data.clamp_(-0.001, 0.001)

    $p.grad.detach().mul_($c)

    $p.grad.view(-1)[:3] = $c

    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], $c)

    $p.grad = torch.full_like($p, $c)

    $p.grad.copy_(torch.full_like($p, $c))

    $p.grad += torch.ones_like($p)

    $p.grad.data = $p.grad.data * $c

    $p.grad.normal_()

    kept["grad"].mul_($c)

    kept["view of grad"].fill_($c)

    $p.grad = kept["clone of grad"]
    """,
)

group(
    "weights read",
    """
    show($p)

    show($p.norm(), $p.sum(), $p.mean().item(), $p.shape, $p.dtype, $p.numel())

    show($p.data.abs().max(), $p.detach().clone(), $p.data.flatten()[0])

    show([p.norm() for p in model.parameters()])

    show(torch.nn.utils.parameters_to_vector(model.parameters()))

    show({name: p.detach().clone() for name, p in model.named_parameters()})

    show($matrix[0], $matrix[1:3, 2], $matrix.t()[3], $matrix.view(-1)[5].item())

    show($p.double(), $p.to(torch.float16), $p.cpu(), $p.contiguous(), $p + 1, 2 - $p, -$p, $vector @ $vector)

    show($p.tolist())

    show(torch.equal($p, $p), torch.isnan($p).any(), bool(($p == $p).all()))

    show($p.detach().numpy().sum().item())

    show(repr($p))

    show(torch.stack([p.detach().float().pow(2).sum() for p in model.parameters()]).sum())

    show(torch._foreach_norm(list(model.parameters())))

    kept["copy"] = copy.deepcopy($p)

    show(kept["copy"])

    show($p.requires_grad, $p.is_leaf, isinstance($p, nn.Parameter), $p.device, $p.stride(), $p.is_contiguous())

    for name, p in model.named_parameters():
        show(name, p)

    kept["detached"] = $p.detach()

    kept["data"] = $p.data

    with torch.no_grad():
        kept["view"] = $p.view(-1)[:2]

    kept["graph view"] = $p.view(-1)[:2]

    show(kept["detached"])

    show(kept["data"])

    show(kept["view"])

    show(kept["graph view"])

    kept["average"] = {name: p.detach().clone() for name, p in model.named_parameters()}

    for name, p in model.named_parameters():
        kept["average"][name].lerp_(p.detach(), 0.1)

    for name, p in model.named_parameters():
        kept["average"][name].mul_(0.9).add_(p.data, alpha=0.1)

    show(kept["average"])
    """,
)

# In memory a tensor kept from before `p.data = t` shows the old values: docs/what-works.md, Limits.
group(
    "weights written",
    """
    with torch.no_grad():
        $p.mul_($c)

    with torch.no_grad():
        $p.copy_(torch.full_like($p, $c))

    with torch.no_grad():
        $matrix[0] = $c

    with torch.no_grad():
        $p.view(-1)[1:2] = $c

    with torch.no_grad():
        $p += $c

    $p.data.mul_($c)

    $p.data[...] = $c

    $p.data.clamp_(-0.01, 0.5)

    $p.data = $p.data * $c
    kept.clear()

    $p.data = torch.full_like($p, $c)
    kept.clear()

    $p.data.copy_(torch.full_like($p, $c))

    $p.data.normal_(0, 0.1)

    $p.detach().mul_($c)

    $p.mul_($c)

    nn.init.normal_($p, std=0.1)

    nn.init.xavier_uniform_($matrix)

    nn.init.zeros_($p)

    model.head.reset_parameters()

    model.body.layers[1].up.reset_parameters()

    vector = torch.nn.utils.parameters_to_vector(model.parameters()) * $c
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    kept.clear()

    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), $c)

    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)

    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.sign(), alpha=-1e-3)

    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept["average"][name])

    for name, p in model.named_parameters():
        p.data.copy_(kept["average"][name])

    kept["data"].mul_($c)

    kept["detached"].add_($c)

    with torch.no_grad():
        kept["view"].fill_($c)

    with torch.no_grad():
        $vector.clamp_(min=0.1).div_($vector.norm())

    with torch.no_grad():
        $p.lerp_($p * 2, 0.1)

    loss = model(*batch($k)).loss
    with torch.no_grad():
        $p.mul_($c)
    loss.backward()

    loss = model(*batch($k)).loss
    $p.data.mul_($c)
    loss.backward()
    """,
)

group(
    "freezing",
    """
    $p.requires_grad_(False)

    $p.requires_grad_(True)

    $p.requires_grad = False

    $module.requires_grad_(False)

    model.requires_grad_(True)

    show([p.requires_grad for p in model.parameters()])

    for p in model.parameters():
        p.requires_grad_(p.dim() > 1)
    """,
)

group(
    "hooks",
    """
    hooks.append($outer.register_forward_hook(lambda m, x, y: show(y.sum()) if torch.is_tensor(y) else None))

    hooks.append($block.register_forward_hook(lambda m, x, y: y * $c))

    hooks.append($block.register_forward_pre_hook(lambda m, x: (x[0] * $c,)))

    hooks.append($block.register_full_backward_hook(lambda m, gi, go: show(gi[0].sum(), go[0].sum())))

    hooks.append($block.register_full_backward_hook(lambda m, gi, go: (gi[0] * $c,)))

    hooks.append($p.register_hook(lambda g: g * $c))

    hooks.append($p.register_hook(lambda g: show(g.norm())))

    hooks.append($p.register_post_accumulate_grad_hook(lambda p: show(p.grad.norm())))

    hooks.append($p.register_post_accumulate_grad_hook(lambda p: p.grad.__setitem__(..., $c)))

    hooks.append($p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * $c)))

    hooks.append($p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))

    hooks.append(optimizer.register_step_pre_hook(lambda *_: show([p.grad for p in model.parameters()])))

    hooks.append(optimizer.register_step_post_hook(lambda *_: show($p)))

    for hook in hooks:
        hook.remove()
    hooks.clear()
    """,
)

group(
    "state dicts",
    """
    show(model.state_dict())

    show($module.state_dict())

    kept["state"] = copy.deepcopy(model.state_dict())

    kept["live state"] = model.state_dict()

    kept["state of a block"] = {name: value.clone() for name, value in $block.state_dict().items()}

    show(kept["state"])

    show(kept["live state"])

    show(model.load_state_dict(kept["state"]).missing_keys)

    $block.load_state_dict(kept["state of a block"])

    model.load_state_dict(kept["live state"])

    model.load_state_dict(dict(scale=torch.tensor($c)), strict=False)

    model.load_state_dict(dict(unknown=torch.tensor(1.0)))

    $block.load_state_dict(kept["state of a block"], assign=True)

    kept["optimizer"] = copy.deepcopy(optimizer.state_dict())

    optimizer.load_state_dict(kept["optimizer"])

    show(optimizer.state_dict()["state"])
    """,
)

group(
    "resuming",
    """
    reopen()
    """,
)

group(
    "interruptions",
    """
    hook = $module.register_forward_hook(stop())
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    hook = $block.register_forward_hook(stop(KeyboardInterrupt))
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    hook = $block.register_forward_pre_hook(stop(KeyboardInterrupt))
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    hook = $p.register_hook(stop())
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()
        model.zero_grad()

    hook = $p.register_hook(stop(KeyboardInterrupt))
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    hook = $block.register_full_backward_hook(stop())
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    hook = $p.register_post_accumulate_grad_hook(stop(KeyboardInterrupt))
    try:
        model(*batch($k)).loss.backward()
    finally:
        hook.remove()

    model(torch.tensor([[99999]]), torch.tensor([[0]]))

    with torch.no_grad():
        hook = $block.register_forward_hook(stop())
        try:
            model(*batch($k))
        finally:
            hook.remove()

    hook = optimizer.register_step_pre_hook(stop())
    try:
        optimizer.step()
    finally:
        hook.remove()
    """,
)

group(
    "conversions",
    """
    model.float()

    model.to("cpu")

    model.to(torch.float32)

    model.double()

    model.half()

    model.cpu()

    copy.deepcopy(model)

    model.apply(lambda m: nn.init.normal_(m.weight, std=0.1) if isinstance(m, nn.Linear) else None)
    """,
)

group(
    "surgery",
    """
    model.body.layers[1].up.bias = nn.Parameter(torch.full((192,), $c))

    model.body.layers[1].up = nn.Linear(192, 192)

    model.extra = nn.Linear(2, 2)

    model.body.norm.bias = None

    model.head.weight = model.body.embedding.weight

    model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    model.body.layers = model.body.layers[:2]

    model.body.layers = nn.ModuleList([model.body.layers[k] for k in (2, 0, 1)])

    model.body.layers[0].up = model.body.layers[1].up

    torch.optim.SGD(model.parameters(), lr=0.1).step()

    torch.optim.AdamW(model.parameters(), fused=True).step()
    """,
)

group(
    "views and results",
    """
    show($p.view(-1).chunk(2), torch.split($p.view(-1), 1)[0], $p.flatten().unbind()[0], [x.sum() for x in $matrix][:2])

    show($matrix.max(dim=0), torch.topk($matrix.flatten(), 3), torch.linalg.norm($matrix), $matrix[$matrix > 0.1].sum())

    show(torch.where($p > 0, $p, 0.0), torch.cat([$p.flatten(), $vector]), $p.expand(2, *$p.shape).sum())

    show($matrix.T @ $matrix)

    out = torch.empty_like($p)
    torch.mul($p.detach(), $c, out=out)
    show(out)

    with torch.no_grad():
        torch.add($p, $c, out=$p)

    with torch.no_grad():
        $matrix[$matrix.abs() < 0.01] = 0

    $matrix.data.masked_fill_($matrix.data < 0, $c)

    with torch.no_grad():
        $matrix.index_fill_(0, torch.tensor([1, 3]), $c)
        $matrix.t()[2].mul_(2)

    with torch.no_grad():
        model.body.layers[0].up.weight.copy_(model.body.layers[2].down.weight)

    with torch.no_grad():
        layers = model.body.layers
        layers[0].up.weight.addmm_(layers[1].up.weight, layers[2].down.weight, alpha=0.1)

    model.body.layers[0].up.weight.data = model.body.layers[2].down.weight.data

    with torch.inference_mode():
        $p.mul_($c)

    with torch.inference_mode():
        show($p.sum(), $p.view(-1)[:2].clone())

    w = $p.detach().requires_grad_()
    (w * w).sum().backward()
    show(w.grad)

    w = $p.clone()
    w.mul_($c).sum().backward()

    show(float(model.scale), f"{model.scale}", bool(model.scale > 0), model.scale.item())

    kept["file"] = io.BytesIO()
    torch.save($p, kept["file"])
    show(torch.load(io.BytesIO(kept["file"].getvalue()), weights_only=True))

    kept["file"] = io.BytesIO()
    torch.save(model.state_dict(), kept["file"])

    model.load_state_dict(torch.load(io.BytesIO(kept["file"].getvalue())))

    lin = nn.Linear(192, 3)
    lin.weight = model.body.layers[0].up.weight
    lin.bias = None
    lin(torch.full((2, 192), 0.5)).square().sum().backward()

    show(torch.asarray($p.detach()).sum(), torch.tensor($p.tolist()), $p.type(torch.float64).half(), copy.copy($p))
    """,
)

group(
    "gradients exchanged",
    """
    a, b = model.body.layers[0].up.weight, model.body.layers[2].down.weight
    a.grad, b.grad = b.grad, a.grad

    $p.grad = $p.grad.clone()

    $p.grad = $p.grad.detach()

    $p.grad = $p.grad

    for p in model.parameters():
        p.grad = torch.full_like(p, $c)

    with torch.no_grad():
        $p.grad.sign_().mul_($c)

    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.mul_(1 / (1 + total))
    show(total)

    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for name, g in grads.items():
        model.get_parameter(name).grad = g
    """,
)

group(
    "around a pass",
    """
    hooks.append($outer.register_forward_pre_hook(lambda m, x: show(model.head.weight.norm(), $p.sum())))

    hooks.append($block.register_forward_pre_hook(lambda m, x: show($p.sum())))

    hooks.append(model.body.layers[1].register_full_backward_hook(lambda m, gi, go: show($p.sum())))

    hooks.append($p.register_hook(lambda g: show($matrix.norm())))

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        model(*batch($k)).loss.backward()

    with torch.autograd.graph.save_on_cpu():
        loss = model(*batch($k)).loss
    loss.backward()
    show(loss)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = model(*batch($k)).loss
    loss.backward()

    for hook in hooks:
        hook.remove()
    model.eval()
    h = model.body.embedding(batch($k)[0])
    h = torch.utils.checkpoint.checkpoint($block, h, use_reentrant=True)
    h.square().mean().backward()

    loss = model(*batch($k)).loss
    $p.requires_grad_(False)
    loss.backward()

    loss = model(*batch($k)).loss
    model.zero_grad(set_to_none=$none)
    loss.backward()

    kept["result"] = model(*batch($k))
    kept["logits"] = kept["result"].logits.detach()
    show(kept["logits"])

    kept["result"].loss.backward()

    try:
        hook = $block.register_forward_hook(stop())
        model(*batch($k))
    except StopHere as error:
        kept["error"] = error
    finally:
        hook.remove()

    def work():
        with torch.no_grad():
            kept["from a thread"] = model(*batch($k)).loss
    in_a_thread(work)
    show(kept["from a thread"])

    def work():
        torch.manual_seed(5)
        model(*batch($k)).loss.backward()
    in_a_thread(work)

    def closure():
        optimizer.zero_grad()
        loss = model(*batch($k)).loss
        loss.backward()
        return loss
    show(optimizer.step(closure))
    optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(*batch($k)).loss).backward()
    scaler.unscale_(optimizer)
    show(optimizer.clip_grad_norm_(0.5))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

    scaler = memascend.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(*batch($k)).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = lambda params: torch.func.functional_call(model, params, batch($k)).loss
    show(torch.func.grad(run)(params)["scale"])

    h = torch.full((1, 3, 192), 0.5)
    show(torch.func.vmap(lambda x: F.linear(x, $matrix))(h))

    $block.average.zero_()

    $block.average = torch.full((192,), $c)

    model.forward = lambda *args, old=model.forward: old(*args)

    """,
)

#: Those that take a gradient after `step` and before `zero_grad`, which consumes it.
group(
    "after a step",
    """
    optimizer.step()

    show([p.grad for p in model.parameters()])

    optimizer.step()
    loss = model(*batch($k)).loss
    optimizer.zero_grad(set_to_none=$none)
    loss.backward()
    """,
)
