"""What a call is, whichever collective it makes.

operation   one rank's part in one collective; its constructor checks the arguments
placement   where the arrays are communicated from, the host or a device, and where results go
runner      makes the calls of one group: constructor, header, steps, result
request     a call that goes on while the caller does something else

What can fail on one rank alone fails in the constructor, before the header, so that the header can
tell the other ranks. The steps are a generator, so that blocking calls and requests are one code.
"""
