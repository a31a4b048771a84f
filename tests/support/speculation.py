"""What tests of drafts share."""


def drop_drafts(monkeypatch, decode):
    """From now on steps that are captured give up every draft before it is computed.

    Args:
        monkeypatch: Undoes it.
        decode: `qerl.rollout.paged.decode`.
    """
    propose = decode.propose

    def nothing(rows, lanes):
        propose(rows, lanes)
        count = len(lanes.drafts_R)
        lanes.drafts_R.zero_()
        lanes.tokens.done_T.view(count, -1)[:, 1:] = 1
        lanes.tokens.limit_2T[1].view(count, -1)[:, 1:] = 0

    monkeypatch.setattr(decode, "propose", nothing)
