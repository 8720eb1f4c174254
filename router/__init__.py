"""router room"""
