"""Make callbacks from their options, or say why one cannot be made."""

import os

from whale_train.callbacks.callback import CALLBACK
from whale_train.callbacks.options import CallbackOptions, CallbacksOptions
from whale_train.errors import ConfigError, Fault
from whale_train.own_code import argument_faults, called, importable, imported, made_object


def refuse_callbacks(options: CallbacksOptions) -> None:
    """Raise ConfigError with a fault for each callback that cannot be imported, is not a callback,
    or does not take its arguments. No callback is made."""
    faults: list[Fault] = []
    for callback in options.listed:
        try:
            with importable(os.getcwd()):
                made = imported(f"{callback.key}._target_", callback.target, CALLBACK)
        except ConfigError as error:
            faults += error.faults
        else:
            name = callback.target.rpartition(".")[2]
            faults += argument_faults(made, callback.arguments, callback.key, name)
    if faults:
        raise ConfigError(faults)


def make_callback(options: CallbackOptions) -> object:
    """Return the callback of `options`. Raises ConfigError where it cannot be imported or made, or
    is not a callback."""
    with importable(os.getcwd()):
        arguments = called(options.key, options.arguments)
        return made_object(options.key, options.target, arguments, CALLBACK)
