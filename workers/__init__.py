"""workers room"""
