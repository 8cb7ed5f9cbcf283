# python -m jaxrl_async.train configs/addition.yaml \
#     model.decoder=configs/own_decoder/parallel.py:ParallelLayer
"""A decoder of one's own: attention and MLP read the same LayerNorm and are added together (as in
GPT-J and Cohere's models), the MLP squares its ReLU, and each head has a learned gate."""

import jax
import jax.numpy as jnp

from jaxrl_async.model.own_layer import OwnLayer, split_heads, turned, weight


def layer_norm(x, scale, shift):
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale + shift


class ParallelLayer(OwnLayer):
    @staticmethod
    def weights(spec):
        return {
            "norm": weight(spec, "embed", init="ones"),
            "shift": weight(spec, "embed", init="zeros"),
            "q": weight(spec, "embed", "heads", "head_dim"),
            "k": weight(spec, "embed", "kv_heads", "head_dim"),
            "v": weight(spec, "embed", "kv_heads", "head_dim"),
            "gate": weight(spec, "embed", "heads"),
            "o": weight(spec, "heads", "head_dim", "embed", inputs=2),
            "up": weight(spec, "embed", "mlp"),
            "down": weight(spec, "mlp", "embed"),
        }

    def normed(self, x):
        return layer_norm(x, self.weight("norm", x), self.weight("shift", x))

    def qkv(self, x, angles):
        y = self.normed(x)
        q, k, v = (split_heads(self.times(y, name), self.spec.head_dim) for name in "qkv")
        return turned(q, angles), turned(k, angles), v

    def finish(self, x, attended, *routing):
        y = self.normed(x)
        gated = attended * (2 * jax.nn.sigmoid(self.times(y, "gate")))[..., None]
        squared = jnp.square(jax.nn.relu(self.times(y, "up")))
        return x + self.times(gated.reshape(*x.shape[:-1], -1), "o") + self.times(squared, "down")

    @staticmethod
    def outer_weights(spec):
        return {"final_shift": weight(spec, "embed", init="zeros")}

    @staticmethod
    def final(spec, params, x):
        scale, shift = (params[n].astype(x.dtype) for n in ("final_norm", "final_shift"))
        return layer_norm(x, scale, shift)
