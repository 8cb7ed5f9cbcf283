"""Layers with latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1), in two equivalent forms.

    q_h = [a_h, t_h]     k_h = [c K_h, r]     v_h = c V_h        t, r: the rotated parts

materialised  keys and values of every head, for whole sequences: minimal arithmetic
absorbed      q_h . k_h = [a_h K_h^T, t_h] . [c, r] and sum_s p_s v_h = (sum_s p_s c) V_h: all heads
              share one key [c, r], which is also the value and which a sampler caches
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.families.parts import Latent
from jaxrl_async.model.layers import Angles, Layer, rms_norm, rotate, split_heads
from jaxrl_async.model.moe import Choose, Experts, route, run_experts
from jaxrl_async.model.quantize import restored
from jaxrl_async.model.spec import LORA_A, LORA_B, latent_table

NORM_EPS = 1e-6
"""Epsilon of the norms of c and of its counterpart for queries, independent of rms_norm_eps."""


class LatentLayer(Layer):
    """A layer with materialised keys and values of every head."""

    @property
    def latent(self) -> Latent:
        """The sizes of the latent vectors."""
        assert self.spec.latent is not None, "LatentLayer is for specs with latent attention"
        return self.spec.latent

    def qkv(self, x: Array, angles: Angles | None) -> tuple[Array, Array, Array]:
        """Return queries, keys and values of x [..., D] for standard multi-head attention: [..., H,
        K] each, values padded with zeros to width K."""
        latent = self.latent
        y = self._norm(x, "attn_norm")
        q, kv = self._projected(y)
        a, t = jnp.split(q, [self.spec.head_dim - latent.rotated], axis=-1)
        c, r = jnp.split(kv, [latent.rank], axis=-1)
        c = rms_norm(c, self._weight("kv_a_norm", x.dtype), NORM_EPS)
        t, r = (self._rotated(part, angles) for part in (t, r[..., None, :]))
        q, k, v = self._expanded(a, t, c, r)
        return self._scaled(q, angles), k, v

    def finish(
        self, x: Array, attended: Array, experts: Experts = run_experts, choose: Choose = route
    ) -> Array:
        """Apply the output projection and the rest, as Layer does, to the values summed by
        attention."""
        return super().finish(x, self._values(attended), experts, choose)

    def _projected(self, y: Array) -> tuple[Array, Array]:
        """Return all heads' queries [..., H, K], and c and r before norm and rotation [..., rank +
        rotated]."""
        first = self.latent.query_rank or self.spec.heads * self.spec.head_dim
        if self.fused:
            q, kv = jnp.split(self._times(y, "qkv_proj"), [first], axis=-1)
        else:
            q, kv = self._times(y, "q_a" if self.latent.query_rank else "q"), self._times(y, "kv_a")
        if self.latent.query_rank:
            q = rms_norm(q, self._weight("q_a_norm", q.dtype), NORM_EPS)
            q = self._times(q, "q_b")
        return split_heads(q, self.spec.head_dim), kv

    def _parts(self, name: str) -> dict[str, int]:
        if name != "qkv_proj":
            return super()._parts(name)
        latent, whole = self.latent, self.spec.heads * self.spec.head_dim
        first = {"q_a": latent.query_rank} if latent.query_rank else {"q": whole}
        return {**first, "kv_a": latent.rank + latent.rotated}

    def _rotated(self, x: Array, angles: Angles | None) -> Array:
        """Rotate the rotated parts, [..., heads, rotated]. Interleaved pairs are first separated,
        in queries and keys."""
        if angles is None:
            return x
        if self.latent.pairs:
            x = jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
        return rotate(x, angles.cos, angles.sin)

    def _expanded(self, a: Array, t: Array, c: Array, r: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values for attention from their parts."""
        wide = a.shape[-1] + self.latent.value
        k, v = jnp.split(split_heads(self._times(c, "kv_b"), wide), [a.shape[-1]], axis=-1)
        k = jnp.concatenate([k, jnp.broadcast_to(r, (*k.shape[:-1], r.shape[-1]))], axis=-1)
        behind = k.shape[-1] - v.shape[-1]
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, behind)])
        return jnp.concatenate([a, t], axis=-1), k, v

    def _values(self, attended: Array) -> Array:
        """Return the summed values of every head, [..., H, value], from attention's output."""
        return attended[..., : self.latent.value]


class AbsorbedLayer(LatentLayer):
    """A latent layer with one key [c, r] for all heads and values of width 0: attention uses the
    keys as values."""

    def _expanded(self, a: Array, t: Array, c: Array, r: Array) -> tuple[Array, Array, Array]:
        keys = slice(0, a.shape[-1])
        low = self._by_head("...hk,rhk->...hr", a, self._up(a.dtype)[..., keys])
        if "kv_b" in self.adapted:
            inner, outer = self._adapter(a.dtype)
            own = self._own(self._by_head("...hk,ahk->...ha", a, outer[..., keys]))
            low = low + self._by_head("...ha,ra->...hr", own, inner)
        k = jnp.concatenate([c[..., None, :], r], axis=-1)
        return jnp.concatenate([low, t], axis=-1), k, k[..., :0]

    def _values(self, attended: Array) -> Array:
        low, value = attended[..., : self.latent.rank], slice(-self.latent.value, None)
        out = self._by_head("...hr,rhv->...hv", low, self._up(low.dtype)[..., value])
        if "kv_b" in self.adapted:
            inner, outer = self._adapter(low.dtype)
            own = self._own(self._by_head("...hr,ra->...ha", low, inner))
            out = out + self._by_head("...ha,ahv->...hv", own, outer[..., value])
        return out

    def _up(self, dtype: jnp.dtype) -> Array:
        """Return K and V of all heads, concatenated, [rank, H, ...]."""
        if not self.scales:
            return self._weight("kv_b", dtype)
        parts = {n: getattr(self, n)[...] for n in ("kv_b", "kv_b" + self.scales)}
        weight = latent_table(self.spec, self.latent)["kv_b"]
        return restored(weight, parts, "kv_b").astype(dtype)

    def _adapter(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return A [rank, adapter's rank] and B [adapter's rank, H, ...] of K and V."""
        return self._weight("kv_b" + LORA_A, dtype), self._weight("kv_b" + LORA_B, dtype)

    def _own(self, low: Array) -> Array:
        """Zero the products [..., H, all adapters' ranks] with other adapters than each row's."""
        return jnp.where(self.lora_own[...][..., None, :], low, 0) if self.chosen else low

    def _by_head(self, how: str, x: Array, weight: Array) -> Array:
        """Return an einsum of rows and a weight in the rows' dtype, as layers.product does."""
        number = jnp.bfloat16 if self.mixed else x.dtype
        wide = jnp.float32 if self.mixed else None
        out = jnp.einsum(how, x.astype(number), weight.astype(number), preferred_element_type=wide)
        return out.astype(x.dtype)
