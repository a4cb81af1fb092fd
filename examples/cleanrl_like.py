"""PPO in one file, after CleanRL, on a cluster: `python examples/cleanrl_like.py CONFIG`."""

from statistics import mean
from sys import argv, exit

import torch

from rlightning.cluster import LocalCluster
from rlightning.learner.ppo import estimate_advantages
from rlightning.policy import build_policy, dump_weights, policy_weights

torch.set_num_threads(1)  # the networks are small
with LocalCluster(argv[1:] or exit(__doc__), overrides=["policy.initial_weights=none"]) as cluster:
    policy = build_policy(cluster.config.policy, "train")
    policy.init_train(env_meta=cluster.env.metas()[0])
    params = [*policy.actor.parameters(), *policy.critic.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3, eps=1e-5)
    returns, train, last = [], cluster.config.train, cluster.config.train.target_episodes
    while len(returns) < last or mean(returns[-last:]) < train.target_return:
        cluster.policy.publish(cluster.policy.version + 1, dump_weights(policy_weights(policy)))
        b = {k: torch.tensor(v) for k, v in cluster.buffer.next_batch().columns.items()}
        ended = {"terminated": b["terminated"], "stop": b["terminated"] | b["truncated"] | b["cut"]}
        value, after = (policy.critic(b[f"{k}observation"])[..., 0].detach() for k in ("", "next_"))
        given = {"reward": b["reward"], "own": b["action_source"] == 1, **ended}
        adv, target = estimate_advantages(0.99, 0.95, value=value, next_value=after, **given)
        flat = {k: v.flatten(0, 1) for k, v in {**b, "adv": adv, "target": target}.items()}
        for i in torch.cat([torch.randperm(adv.numel()) for _ in range(4)]).split(256):
            obs, action, a = (flat[k][i] for k in ("observation", "action", "adv"))
            log_prob = policy.distribution(policy.actor(obs)).log_prob(action)
            ratio = (log_prob - flat["log_prob"][i]).exp()
            a = (a - a.mean()) / (a.std() + 1e-8)
            policy_loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
            value_loss = 0.5 * (policy.critic(obs).squeeze(-1) - flat["target"][i]).square().mean()
            optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        returns += [episode.episode_return for episode in cluster.env.episodes()]
        print(f"version {cluster.policy.version}  return {mean(returns[-last:]):.1f}", flush=True)
