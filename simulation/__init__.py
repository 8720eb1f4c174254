"""simulation room"""
