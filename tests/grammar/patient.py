"""Matchers that take their time, for tests of what grammars mean."""

from jaxserve.grammar import GrammarCompiler


class PatientCompiler(GrammarCompiler):
    def matcher(self, spec):
        matcher = super().matcher(spec)
        matcher.patient = True
        return matcher
