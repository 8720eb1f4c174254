"""The course of one request: its SLO, what an instance's answer means, and whether an instance is still tried."""
