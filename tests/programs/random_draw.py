"""What configurations of random tiny models have in common."""

import random
from typing import Any

Config = dict[str, Any]
VOCAB, POSITIONS = 64, 256


class Draw(random.Random):
    """What several types draw alike."""

    def yes(self) -> bool:
        return self.random() < 0.5

    def size(self) -> int:
        return self.choice((20, 33, 48, 61, 96))

    def heads(self, dims: tuple[int, ...] = (8, 12, 16, 24, 40)) -> Config:
        """Query heads for each key head from one to eight."""
        kv_heads = self.choice((1, 2, 3))
        return {
            "num_attention_heads": kv_heads * self.choice((1, 2, 3, 4, 7, 8)),
            "num_key_value_heads": kv_heads,
            "head_dim": self.choice(dims),
        }

    def evenly(self) -> Config:
        """Heads that divide the width."""
        kv_heads = self.choice((1, 2, 3))
        heads = kv_heads * self.choice((1, 2, 4))
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * self.choice((8, 12, 16)),
        }

    def dense(self) -> Config:
        return {
            "hidden_size": self.choice((32, 40, 72)),
            "intermediate_size": self.size(),
            "tie_word_embeddings": self.yes(),
            "rms_norm_eps": self.choice((1e-6, 1e-5, 1e-3)),
        }

    def mix(self, kinds: tuple[str, ...], count: int) -> list[str]:
        """Layers of random kinds, each of these at least once."""
        layers = [*kinds, *(self.choice(kinds) for _ in range(count - len(kinds)))]
        self.shuffle(layers)
        return layers

    def rope(self, **more: object) -> Config:
        return {"rope_type": "default", "rope_theta": self.choice((1e2, 1e4, 1e6)), **more}

    def yarn(self, **more: object) -> Config:
        return {
            **self.rope(),
            "rope_type": "yarn",
            "factor": self.choice((2.0, 4.0, 16.0)),
            "original_max_position_embeddings": self.choice((16, 32)),
            "beta_fast": self.choice((4.0, 32.0)),
            "beta_slow": 1.0,
            **more,
        }

    def experts(self, total: str = "num_experts", taken: str = "num_experts_per_tok") -> Config:
        count = self.choice((3, 4, 6, 9, 17))
        return {total: count, taken: self.randint(1, min(count, 4))}

    def groups(self, total: str = "n_routed_experts") -> Config:
        """Experts in groups, of which a token takes some."""
        groups, each = self.choice((1, 2, 4)), self.choice((2, 3, 4))
        top = self.randint(1, groups)
        return {
            total: groups * each,
            "n_group": groups,
            "topk_group": top,
            "num_experts_per_tok": self.randint(1, min(4, top * each)),
            "moe_intermediate_size": self.choice((12, 16, 33)),
            "n_shared_experts": self.choice((1, 2)),
            "routed_scaling_factor": self.choice((1.0, 2.5)),
            "norm_topk_prob": self.yes(),
        }

    def latent(self) -> Config:
        heads = self.choice((1, 3, 4, 8))
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": self.choice((None, 16, 27)),
            "kv_lora_rank": self.choice((16, 32, 48)),
            "qk_rope_head_dim": self.choice((8, 16)),
            "qk_nope_head_dim": self.choice((8, 12, 20)),
            "v_head_dim": self.choice((8, 10, 20)),
        }
