"""Recorded collectives as linop's operators: `collectives` lifts one that ran on several ranks,
`functions` composes those of a function with what ranks do in their own memory (`places`), `naming`
says in words which collective an operator is."""
