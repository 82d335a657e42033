"""Plain data: messages, generation, rollout records, errors, clock."""
