"""What a policy gains over SFT, read from the table of an evaluation."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from stages.pooling.pool import list_scores, read_gain


def test_gains_are_paired_by_question_for_every_score_that_both_have(tmp_path):
    parquet.write_table(pa.Table.from_pylist([
        {"dpo_best": "a", "sft_best": "b", "gold_dpo_best": 3.0, "gold_sft_best": 1.0, "reward_dpo_best": 1.0,
         "reward_sft_best": 0.5, "odd_dpo_best": 1.0, "gold_ppo_best": 9.0},
        {"dpo_best": "a", "sft_best": "b", "gold_dpo_best": None, "gold_sft_best": None, "reward_dpo_best": 0.0,
         "reward_sft_best": 0.5, "odd_dpo_best": 1.0, "gold_ppo_best": 9.0}]), tmp_path / "samples.parquet")
    assert list_scores(tmp_path, "dpo") == ["gold", "reward"]
    assert read_gain(tmp_path, "dpo", "reward").tolist() == [0.5, -0.5]
    gold = read_gain(tmp_path, "dpo", "gold")
    assert gold[0] == 2.0 and np.isnan(gold[1])
